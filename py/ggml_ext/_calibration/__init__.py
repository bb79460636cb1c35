"""What is known of a model's inputs, and the calibration that finds it out."""
