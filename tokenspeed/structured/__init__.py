"""Grammars for output: from what a request demands to masks over the vocabulary. No torch here."""
