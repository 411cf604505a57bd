"""The account of samples."""
