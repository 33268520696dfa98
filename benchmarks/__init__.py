"""Speed, memory and accuracy as ratios, both sides measured in one run."""
