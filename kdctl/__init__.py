"""kdctl: the command line of the kd daemon."""
