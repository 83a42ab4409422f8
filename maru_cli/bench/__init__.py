"""What `maru bench` measures: one module each, free of command-line handling."""
