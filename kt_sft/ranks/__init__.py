"""Several processes: of one host, of one run."""
