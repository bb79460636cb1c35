"""Choose types by measured errors, to reach a target size or quality."""
