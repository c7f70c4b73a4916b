"""`python -m kilter` is the same as the command `kilter`."""

from kilter.cli import main

if __name__ == "__main__":
    main()
