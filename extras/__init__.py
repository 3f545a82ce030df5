"""Optional features, one file each. Any of them can be deleted; the scripts still run."""
