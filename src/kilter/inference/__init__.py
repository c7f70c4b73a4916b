"""Using a model after a run: load it, predict, evaluate it on other data, export it."""
