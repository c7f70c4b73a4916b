"""Models of how data is distributed, for the methods that need one."""
