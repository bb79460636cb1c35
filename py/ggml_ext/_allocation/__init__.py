"""A size or a quality in place of a type: types chosen by measured errors."""
