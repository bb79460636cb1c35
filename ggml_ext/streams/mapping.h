// Memory for the streams, or shared with the parent process.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace ggml_ext {

[[noreturn]] inline void fail(const std::string & message) {
    throw std::runtime_error(message);
}

// Memory of the process, or of a file.
class mapping {
public:
    mapping() = default;
    mapping(const std::string & path, size_t n_bytes, bool remove) : n_bytes(n_bytes) {
        int fd = -1;
        if (!path.empty()) {
            fd = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600); // never overwrite another file
            if (fd < 0) {
                fail("cannot open " + path + ": " + strerror(errno));
            }
            if (remove) {
                unlink(path.c_str());
            }
#ifdef __APPLE__ // has no posix_fallocate()
            int error = EOPNOTSUPP;
#else
            int error = posix_fallocate(fd, 0, (off_t) n_bytes);
#endif
            if (error == EOPNOTSUPP || error == EINVAL) { // some network and FUSE drives
                error = ftruncate(fd, (off_t) n_bytes) ? errno : 0;
            }
            if (error) {
                close(fd);
                fail("no room for " + std::to_string(n_bytes >> 20) + " MiB in " + path + ": " + strerror(error));
            }
        }
        address = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
        const int error = errno;
        if (fd >= 0) {
            close(fd);
        }
        if (address == MAP_FAILED) {
            address = nullptr;
            fail(fd >= 0 && error == ENODEV
                     ? "cannot map " + path + " into memory, its drive does not allow it: write to a local disk"
                     : "no memory for " + std::to_string(n_bytes >> 20) + " MiB: " + strerror(error));
        }
    }
    mapping(const mapping &) = delete;
    mapping & operator=(mapping && other) noexcept {
        std::swap(address, other.address);
        std::swap(n_bytes, other.n_bytes);
        return *this;
    }
    ~mapping() {
        if (address) {
            munmap(address, n_bytes);
        }
    }

    char * data() const { return (char *) address; }
    size_t size() const { return n_bytes; }

private:
    void * address = nullptr;
    size_t n_bytes = 0;
};

} // namespace ggml_ext
