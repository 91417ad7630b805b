"""`python -m whalepod` is the `whalepod` command."""

from whalepod.cli.main import main

if __name__ == "__main__":
    main()
