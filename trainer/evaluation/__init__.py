"""What a head is worth: decoding, scoring and comparing."""
