"""Other programs' weights in and out."""
