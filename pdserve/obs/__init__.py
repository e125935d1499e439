"""What a running process tells about itself: log lines (`logging`) and Prometheus metrics (`metrics`)."""
