"""What runs a pipeline. They share the plan, the steps of a bundle, and the inference session."""
