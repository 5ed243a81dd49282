"""RunInference: the handler contract, keys, results, and the session in which every engine runs models."""
