"""What ``docker inspect`` shows of a container where its client said nothing: other clients read every field."""

from __future__ import annotations

from types import MappingProxyType

CONFIG = MappingProxyType[str, object](
    {
        "Hostname": "", "Domainname": "", "User": "", "AttachStdin": False, "AttachStdout": False,
        "AttachStderr": False, "Tty": False, "OpenStdin": False, "StdinOnce": False, "Env": [], "Cmd": None,
        "Volumes": None, "WorkingDir": "", "Entrypoint": None, "OnBuild": None,
    }
)  # fmt: skip
HOST_CONFIG = MappingProxyType[str, object](
    {
        "Binds": None, "ContainerIDFile": "", "NetworkMode": "default", "PortBindings": None,
        "RestartPolicy": {"Name": "", "MaximumRetryCount": 0}, "AutoRemove": False, "VolumeDriver": "",
        "VolumesFrom": None, "CapAdd": None, "CapDrop": None, "Dns": None, "DnsOptions": None, "DnsSearch": None,
        "ExtraHosts": None, "GroupAdd": None, "Cgroup": "", "Links": None, "OomScoreAdj": 0, "PidMode": "",
        "Privileged": False, "PublishAllPorts": False, "ReadonlyRootfs": False, "SecurityOpt": None, "UTSMode": "",
        "UsernsMode": "", "ConsoleSize": [0, 0], "Isolation": "", "CpuShares": 0, "Memory": 0, "NanoCpus": 0,
        "CgroupParent": "", "BlkioWeight": 0, "BlkioWeightDevice": None, "BlkioDeviceReadBps": None,
        "BlkioDeviceWriteBps": None, "BlkioDeviceReadIOps": None, "BlkioDeviceWriteIOps": None, "CpuPeriod": 0,
        "CpuQuota": 0, "CpuRealtimePeriod": 0, "CpuRealtimeRuntime": 0, "CpusetCpus": "", "CpusetMems": "",
        "Devices": None, "DeviceCgroupRules": None, "DeviceRequests": None, "MemoryReservation": 0, "MemorySwap": 0,
        "MemorySwappiness": None, "OomKillDisable": False, "PidsLimit": None, "Ulimits": None, "CpuCount": 0,
        "CpuPercent": 0, "IOMaximumIOps": 0, "IOMaximumBandwidth": 0,
    }
)  # fmt: skip
#: Sandboxes are in no network of the engine's.
NETWORK_SETTINGS = MappingProxyType[str, object](
    {
        "Bridge": "", "SandboxID": "", "SandboxKey": "", "HairpinMode": False, "LinkLocalIPv6Address": "",
        "LinkLocalIPv6PrefixLen": 0, "Ports": {}, "SecondaryIPAddresses": None, "SecondaryIPv6Addresses": None,
        "EndpointID": "", "Gateway": "", "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0, "IPAddress": "",
        "IPPrefixLen": 0, "IPv6Gateway": "", "MacAddress": "", "Networks": {},
    }
)  # fmt: skip
