"""What the U-Net reads and predicts."""
