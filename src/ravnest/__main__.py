"""`python -m ravnest` is the same as `ravnest`."""

from __future__ import annotations

from ravnest.cli.main import main

if __name__ == "__main__":
    main()
