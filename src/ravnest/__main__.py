"""`python -m ravnest` is the same as `ravnest`."""

from .cli import main

if __name__ == "__main__":
    main()
