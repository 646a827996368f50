"""`python -m eaglecli`."""

from eaglecli.cli import main

if __name__ == "__main__":
    main()
