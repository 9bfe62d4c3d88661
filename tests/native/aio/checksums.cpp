// Does CRC32C give what RFC 3720 says, with and without special instructions, for any length and start?
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "crc32c.h"

using namespace infinity::aio;

int main() {
  // RFC 3720, appendix B.4, and the check value of the catalogue of CRCs.
  std::vector<unsigned char> bytes(32, 0);
  CHECK(crc32c(bytes.data(), 32) == 0x8a9136aa);
  std::memset(bytes.data(), 0xff, 32);
  CHECK(crc32c(bytes.data(), 32) == 0x62a8ab43);
  for (int i = 0; i < 32; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<unsigned char>(i);
  CHECK(crc32c(bytes.data(), 32) == 0x46dd794e);
  CHECK(crc32c_portable("123456789", 9) == 0xe3069283);
  CHECK(crc32c(nullptr, 0) == 0);

  std::mt19937_64 random(7);
  std::vector<unsigned char> data(100003);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  for (int round = 0; round < 400; ++round) {
    const std::size_t begin = random() % data.size(), length = random() % (data.size() - begin + 1);
    const auto seed = static_cast<std::uint32_t>(random());
    const unsigned char* at = data.data() + begin;
    const std::uint32_t whole = crc32c(at, length, seed);
    CHECK(whole == crc32c_portable(at, length, seed));
    const std::size_t cut = random() % (length + 1);
    CHECK(whole == crc32c(at + cut, length - cut, crc32c(at, cut, seed)));
  }
  std::vector<std::uint32_t> sums(4, 0);
  crc32c_pieces(data.data(), data.size(), 32768, sums.data());
  for (std::size_t i = 0; i < 4; ++i) {
    const std::size_t length = i < 3 ? 32768 : data.size() - 3 * 32768;
    CHECK(sums[i] == crc32c(data.data() + i * 32768, length));
  }
  std::printf("%s\n", crc32c_kind());
  return 0;
}
