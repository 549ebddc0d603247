"""What the GPU backends share."""
