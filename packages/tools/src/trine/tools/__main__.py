"""`python -m trine.tools`: the command `trine` where the script is not on the path."""

from trine.tools.cli import main

if __name__ == "__main__":
    main(prog_name="python -m trine.tools")
