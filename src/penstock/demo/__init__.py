"""The demo: train, save meanwhile, be killed in the middle of a save, resume, compare bit for bit."""
