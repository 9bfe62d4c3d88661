// The part of libcuda.so.1 that threads of the cuFile engine call: the context, and the mode in which they meet graphs that others capture.
int made = 0;      // what the context is made of
int taken = 0;      // threads that made it theirs
int ignoring = 0;  // threads that took the thread-local mode after that

static __thread int has_context;

int cuCtxGetCurrent(void** context) {
  *context = &made;
  return 0;
}

int cuCtxSetCurrent(void* context) {
  if (context != &made) return 201;
  has_context = 1;
  __atomic_add_fetch(&taken, 1, __ATOMIC_RELAXED);
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  if (*mode == 1 && has_context) __atomic_add_fetch(&ignoring, 1, __ATOMIC_RELAXED);
  *mode = 0;
  return 0;
}
