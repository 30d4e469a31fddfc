// Seals the bytes of one connection. Others who read them on their way learn nothing but how many they are; where they
// are changed, repeated, reordered or left out, the receiver notices, and takes nothing from there on.
//
// Each direction is a row of records: a head with the length of a text, twice, the text under AES-256-GCM, and a tag
// that proves both: a length that was changed by chance is noticed at once, and no bytes are awaited that never come.
// The key of a direction is made by HKDF-SHA256 (RFC 5869) from the secret of the job and all that the handshake has
// said, which has a random number of each side: each connection has keys of its own. The nonce of a record is its
// number.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct evp_cipher_ctx_st;

namespace ringtrain {

class Sealing {
 public:
  static constexpr size_t kHeadBytes = 8, kTagBytes = 16, kMostText = 64 << 10;
  static constexpr size_t kMostBytes = kHeadBytes + kMostText + kTagBytes;  // of a record

  // Throws failure where OpenSSL's libcrypto is not there. It is loaded when somebody asks for it first.
  static void require();

  // `said`: by both sides of the handshake; `dials`: this is the side that has dialled.
  Sealing(const std::string& secret, const std::string& said, bool dials);

  // Writes the record of these parts, which have `bytes` together, 1 to kMostText; returns its length.
  size_t seal(const iovec* parts, size_t count, size_t bytes, char* record);

  // Of a record whose head is there; 0 where it is none.
  static size_t text_bytes(const char* record);
  // Writes its text. False where it is not the next one that the other side has sealed; the text means nothing then.
  bool open(const char* record, size_t bytes, char* text);

 private:
  // One direction.
  struct Way {
    struct Free {
      void operator()(evp_cipher_ctx_st* context) const;
    };
    std::unique_ptr<evp_cipher_ctx_st, Free> context;
    uint64_t records = 0;

    Way(const std::string& key, bool seals);
    std::array<uint8_t, 12> next_nonce();
  };

  Way out_, in_;
};

}  // namespace ringtrain
