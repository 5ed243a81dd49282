"""A split through the steps of a stage: operators, and the bundle that drives them."""
