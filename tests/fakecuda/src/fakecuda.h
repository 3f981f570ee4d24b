// What the parts of the emulation share. All of it lives in libcudart.so.13.
#pragma once
#include <cuda_runtime_api.h>
#include <cstdint>
#include <cstdio>
#include <functional>

extern "C" {
// Runs fn(arg) when all that was enqueued on the stream before is over. `kind`: see Kind. A stream that captures runs
// it at every launch of its graph. `drop`, where it is given, deletes arg at the end.
void fakecuda_enqueue(cudaStream_t stream, const char* name, void (*fn)(void*), void* arg, int kind, void (*drop)(void*));
void fakecuda_run_beside(cudaStream_t stream, const char* name, std::function<void()> run, int kind);  // no capture notes it
// 1 and fills the rest when ptr lies in device memory, 2 for pinned host memory, else 0.
int fakecuda_find(const void* ptr, int* device, void** base, size_t* size);
// Makes the device fail from now on, as an illegal access would.
void fakecuda_fail(int device, const char* what);
int fakecuda_stream_device(cudaStream_t stream);
int fakecuda_messages(int device);                   // the operations of NCCL that are queued or run there
double fakecuda_env(const char* name, double otherwise);
void fakecuda_at_end(void (*report)());              // called by fakecuda_summary
void fakecuda_summary();                             // at the end; a process that leaves by _exit may call it
FILE* fakecuda_report();                             // where summaries go
void fakecuda_note(const char* counter, long long by);  // adds to a counter of the summary
}

enum Kind { KERNEL = 0, COPY_H2D, COPY_D2H, COPY_D2D, COPY_PEER, MEMSET, HOST_FN, RECORD, WAIT, MESSAGE, POISON, GRAPH };
