"""`python -m ffncli`."""

from ffncli.cli.main import main

if __name__ == "__main__":
    main()
