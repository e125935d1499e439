"""Measuring without peers: the machine's peaks, kernels, whole steps, a running router (`pdserve bench`)."""
