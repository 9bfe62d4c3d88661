// CRC32C (Castagnoli, RFC 3720 section 12.1) over memory, with the instructions of this CPU where it has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::aio {

// Of `bytes` bytes that follow those that gave `crc`; 0 for the first ones.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc = 0);

// The same without special instructions: the specification.
std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc = 0);

// Of every piece of `piece` bytes, the last one may be shorter: one after the other to `sums`.
void crc32c_pieces(const void* data, std::size_t bytes, std::size_t piece, std::uint32_t* sums);

// "sse4.2", "armv8" or "portable".
const char* crc32c_kind();

}  // namespace infinity::aio
