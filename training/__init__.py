"""What a training run is besides its steps: what it tells, shows and keeps."""
