"""TODO(package owner): say what this package is."""
