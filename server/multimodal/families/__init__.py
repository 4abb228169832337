"""What each family writes into the prompt for an image: base.py is the seam, one file a form."""
