"""What becomes of the flags and keywords that users of other engines type."""
