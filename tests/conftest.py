"""One thread for all tests: the models are tiny, and threads that wait for each other make a busy machine crawl."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the scripts that tests start
