"""The verbs of the command line, one module each: resolved settings in, exit status out."""
