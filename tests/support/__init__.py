"""What tests share: byte comparison and inputs."""
