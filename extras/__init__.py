"""Optional features, one file each. Any of them can be deleted; the scripts run on without it."""
