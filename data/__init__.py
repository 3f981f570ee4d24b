"""From files of text to rows of token ids."""
