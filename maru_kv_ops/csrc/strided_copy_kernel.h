// Launching the kernel. All addresses of a copy must be readable (and writable) by the device under
// the same value: its own memory, or host memory that is pinned and mapped.
//
// Both functions return at once; the work runs on `stream`, in its order. A copy without work
// launches nothing. `max_blocks` limits every launch: max_blocks_of_a_launch.

#pragma once

#include <cuda_runtime_api.h>

#include "kernel_launch.h"
#include "strided_copy.h"

namespace maru {

// The ids (and object_starts) of the copy lie where the device reads them, and stay there until the
// stream has come past the launch.
cudaError_t launch_strided_copy(const StridedCopy& copy, int max_blocks, cudaStream_t stream);

// The ids (and object_starts) of the copy lie in host memory of any kind and are read during the
// call. One launch for every kOwnItems items.
cudaError_t launch_with_own_numbers(const StridedCopy& copy, int max_blocks, cudaStream_t stream);

} // namespace maru
