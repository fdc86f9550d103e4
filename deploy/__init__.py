"""Files for running Baton beside other systems, and what writes those that are generated."""
