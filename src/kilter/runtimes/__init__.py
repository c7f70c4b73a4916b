"""Where a method runs. A runtime is an implementation of `map`: it knows no method, and no method knows it."""
