// What a test asks of the GPU that it plays. C names, so that Python reaches them through ctypes.
#pragma once

#include <cstdint>

extern "C" {

// Settings, by name; returns the value before.
//   devices          how many there are (1); 0: there is no driver
//   multiprocessors  of a device (2); each has room for one block of a kernel
//   order            in which threads run between exchanges: 0 forward, 1 backward, more: shuffled by that seed (0)
//   queued           1: a launch waits until its stream is synchronized (0)
//   error            of approximate instructions, an on_cpu::Error (0)
long on_cpu_set(const char* name, long value);

// After so many calls of the function, one returns `error` and does nothing.
void on_cpu_fail(const char* function, long after, int error);
void on_cpu_heal();                           // what was to fail, and the last error of the thread
long on_cpu_calls(const char* function);      // until now

void* on_cpu_stream(int device);              // a new one, for good
long on_cpu_waiting(void* stream);            // launches that have not run
void on_cpu_synchronize(void* stream);
long on_cpu_launches();                       // until now
long on_cpu_kernels();                        // that were launched, each counted once
int on_cpu_capture_mode();                    // of the calling thread

// Gives launches to the streams of another device: `push` calls run(work) when its turn comes, from any thread. Null: back.
void on_cpu_push_to(void (*push)(std::uintptr_t stream, void (*run)(void*), void* work));
}
