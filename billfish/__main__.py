"""`python -m billfish` is `billfish`."""

from billfish.cli import main

if __name__ == "__main__":
    main()
