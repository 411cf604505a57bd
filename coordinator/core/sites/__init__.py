"""Who is here, and until when."""
