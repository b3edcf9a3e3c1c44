"""`python -m dsrun` is `dsrun`."""

from dsrun.launcher.cli import main

if __name__ == "__main__":
    main()
