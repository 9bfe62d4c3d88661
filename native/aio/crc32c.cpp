// One crc32 instruction takes eight bytes and three cycles, and another one may begin in each cycle. So three streams of
// kStream bytes run side by side. A CRC is linear: the one of A followed by B is that of A, moved on over the length of B, xor
// that of B begun at 0 (crc of B with the register at 0). Moving on over kStream bytes is a fixed linear map of 32 bits: four
// tables of 256 words.
#include "crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define INFINITY_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define INFINITY_CRC_TARGET __attribute__((target("+crc")))
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

namespace infinity::aio {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected
constexpr std::size_t kStream = 4096;

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: the register after byte b and k bytes of zeros.
constexpr Table make_table() {
  Table tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k)
    for (std::size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 0xff];
  return tables;
}

constexpr Table kTable = make_table();

std::uint64_t word_at(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

std::uint32_t portable(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const std::uint64_t word = word_at(data) ^ crc;
    crc = 0;
    for (unsigned at = 0; at < 8; ++at) crc ^= kTable[7 - at][word >> 8 * at & 0xff];
  }
  for (; bytes > 0; ++data, --bytes) crc = crc >> 8 ^ kTable[0][(crc ^ *data) & 0xff];
  return crc;
}

#ifdef INFINITY_CRC_TARGET

#if defined(__x86_64__)
constexpr const char* kInstructions = "sse4.2";
bool has_instructions() { return __builtin_cpu_supports("sse4.2"); }
INFINITY_CRC_TARGET std::uint64_t next(std::uint64_t crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
INFINITY_CRC_TARGET std::uint32_t next_byte(std::uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
#else
constexpr const char* kInstructions = "armv8";
bool has_instructions() { return getauxval(AT_HWCAP) & HWCAP_CRC32; }
INFINITY_CRC_TARGET std::uint64_t next(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
INFINITY_CRC_TARGET std::uint32_t next_byte(std::uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
#endif

using Moves = std::array<std::array<std::uint32_t, 256>, 4>;

// The register after kStream bytes of zeros, for each byte of it alone.
Moves make_moves() {
  std::array<std::uint32_t, 32> bits{};
  const std::array<unsigned char, kStream> zeros{};
  for (unsigned bit = 0; bit < 32; ++bit) bits[bit] = portable(zeros.data(), kStream, std::uint32_t{1} << bit);
  Moves moves{};
  for (unsigned at = 0; at < 4; ++at)
    for (unsigned byte = 0; byte < 256; ++byte)
      for (unsigned bit = 0; bit < 8; ++bit)
        if (byte >> bit & 1) moves[at][byte] ^= bits[8 * at + bit];
  return moves;
}

std::uint32_t moved(const Moves& moves, std::uint32_t crc) {
  return moves[0][crc & 0xff] ^ moves[1][crc >> 8 & 0xff] ^ moves[2][crc >> 16 & 0xff] ^ moves[3][crc >> 24];
}

INFINITY_CRC_TARGET std::uint32_t hardware(const unsigned char* data, std::size_t bytes, std::uint32_t crc) {
  static const Moves moves = make_moves();
  for (; bytes >= 3 * kStream; data += 3 * kStream, bytes -= 3 * kStream) {
    std::uint64_t first = crc, second = 0, third = 0;
    for (std::size_t at = 0; at < kStream; at += 8) {
      first = next(first, word_at(data + at));
      second = next(second, word_at(data + kStream + at));
      third = next(third, word_at(data + 2 * kStream + at));
    }
    crc = moved(moves, static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    crc = moved(moves, crc) ^ static_cast<std::uint32_t>(third);
  }
  std::uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) wide = next(wide, word_at(data));
  crc = static_cast<std::uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) crc = next_byte(crc, *data);
  return crc;
}

#else

constexpr const char* kInstructions = "portable";
bool has_instructions() { return false; }
std::uint32_t hardware(const unsigned char* data, std::size_t bytes, std::uint32_t crc) { return portable(data, bytes, crc); }

#endif

bool is_fast() {
  static const bool fast = has_instructions();
  return fast;
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t crc) {
  const auto* at = static_cast<const unsigned char*>(data);
  return ~(is_fast() ? hardware(at, bytes, ~crc) : portable(at, bytes, ~crc));
}

std::uint32_t crc32c_portable(const void* data, std::size_t bytes, std::uint32_t crc) {
  return ~portable(static_cast<const unsigned char*>(data), bytes, ~crc);
}

void crc32c_pieces(const void* data, std::size_t bytes, std::size_t piece, std::uint32_t* sums) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t begin = 0; begin < bytes; begin += piece) *sums++ = crc32c(at + begin, std::min(piece, bytes - begin));
}

const char* crc32c_kind() { return is_fast() ? kInstructions : "portable"; }

}  // namespace infinity::aio
