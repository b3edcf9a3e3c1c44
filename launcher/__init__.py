"""The launcher: from a command line to one supervised process per rank, and back as one stream of lines."""
