"""The tab "Build TRT engine": gradio over the core; the host hands it its facts."""
