"""Models of each framework behind the Model contract: `numpy` networks and `torch` modules."""
