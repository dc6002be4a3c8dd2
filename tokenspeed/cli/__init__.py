"""The command line: a file a command, argument parsing and nothing else."""
